"""How a host holds parameters, one file for each way: what a rank steps and what it saves."""
