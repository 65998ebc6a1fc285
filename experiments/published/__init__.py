"""Published training runs: read, priced and compared; constants fitted to them."""
