"""Answers of commands: tables and pictures for terminals, and records for JSON."""
