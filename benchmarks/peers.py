"""Virtual environments for the trainers that lavra is compared with.

    python benchmarks/peers.py [--peers FOLDER]

Each peer gets its own, with the torch of this environment: it is installed first and held fast, so that no dependency
replaces it by a build for another machine. Run it again to bring the peers up to date.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

PACKAGES = {
    "litgpt": ["litgpt>=0.5.13,<0.6"],
    "huggingface": ["transformers>=5.24,<6", "accelerate>=1.16,<2"],
}
DEFAULT_FOLDER = Path("~/.cache/lavra-peers")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="default: %(default)s")
    folder = parser.parse_args().peers.expanduser()
    for name in PACKAGES:
        install(folder, name)


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of a peer's environment, whether it is there or not."""
    return folder.expanduser() / name / "bin" / "python"


def install(folder: Path, name: str) -> None:
    """Create the peer's environment, or bring it up to date."""
    torch = f"torch=={version('torch').partition('+')[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(torch + "\n")
    subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
    pip = [str(python_of(folder, name)), "-m", "pip", "install", "-q", "-c", str(constraints)]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "--upgrade", *PACKAGES[name]], check=True)
    print(f"{name}: ready")


if __name__ == "__main__":
    main()
