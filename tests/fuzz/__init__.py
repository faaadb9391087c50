"""Random attention graphs against float64 eager."""
