"""What can only be tried on a GPU, in one command."""
