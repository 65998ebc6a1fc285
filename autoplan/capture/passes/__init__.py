"""What is rewritten between."""
