"""Files and folders of all formats: read lazily and without running code, written whole or not at all."""
