"""From a module to ATen: export, inputs, sources."""
