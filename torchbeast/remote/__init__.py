"""What only PolyBeast needs: environment servers, streams to them, their protocol."""
