"""The edge of the system: text, pictures, HTTP, commands. The only room that a user touches."""
