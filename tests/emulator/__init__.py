"""Tests of the CPU emulator."""
