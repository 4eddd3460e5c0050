"""What is minimised: advantages, corrections, losses."""
