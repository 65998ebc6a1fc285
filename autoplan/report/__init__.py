"""Reports: plans, estimates and what-ifs as text for people (text, tables) and as versioned JSON (data). No torch."""
