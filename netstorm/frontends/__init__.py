"""What training scripts see: one package a framework."""
