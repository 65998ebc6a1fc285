"""Everything around the trace: inputs, sizes as symbols, layers marked, Hugging Face classes, files and the cache."""
