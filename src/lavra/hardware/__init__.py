"""What this machine is and what it measures."""
