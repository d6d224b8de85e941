"""Fuzzing: mutated inputs for decoders, guided by coverage, with bounds on time and memory."""

from __future__ import annotations

from netstorm.testing.fuzz.corpus import load_corpus, save_corpus
from netstorm.testing.fuzz.loop import Finding, Fuzzer
from netstorm.testing.fuzz.target import Mutator, Target

__all__ = ["Finding", "Fuzzer", "Mutator", "Target", "load_corpus", "save_corpus"]
