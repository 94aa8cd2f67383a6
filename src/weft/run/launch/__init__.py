"""Workers of a local run: started, watched, ended, and how they tell what went wrong."""
