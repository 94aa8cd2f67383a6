"""What commands answer: tables and pictures for terminals, and records for JSON."""
