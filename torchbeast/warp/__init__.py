"""What only WarpBeast needs: environments that are tensor programs."""
