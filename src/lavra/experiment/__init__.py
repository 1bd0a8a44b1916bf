"""Everything that trains something to learn something: the calibration probe."""
