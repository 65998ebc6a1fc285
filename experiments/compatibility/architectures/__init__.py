"""Models after published architectures whose packages are not installed here: small, with their operations."""
