"""The GLM conversation format: reading what the model wrote, writing what was said before."""
