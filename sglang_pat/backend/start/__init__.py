"""What is decided once, when a server starts: what is supported, which layers there are, what memory holds."""
