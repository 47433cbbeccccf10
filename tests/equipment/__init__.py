"""What several test packages need: processes to kill, fault points to kill them at, trees to compare."""
