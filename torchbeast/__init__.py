"""What carries the programs and the agents. Forking a program needs no edit in here."""
