"""lavra: turn raw text into a measured language model inside your hardware, time and money."""

__version__ = "0.1.0"
