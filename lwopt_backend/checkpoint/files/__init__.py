"""Files and folders beneath all formats: read lazily and without running anything, written whole or not."""
