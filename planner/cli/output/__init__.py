"""How commands answer: tables that fit, formats, files, and lines now and then. Imports nothing heavy."""
