"""A proof holds for one key pair and one job's key, and for nothing else."""

from __future__ import annotations

import pytest

from netstorm.pslite.admission import PROOF_BYTES, ProcessProof
from netstorm.pslite.keys import CurveKeys, JobKey

KEY = JobKey(bytes(range(32)))
OWN, OTHER = (CurveKeys.from_secret(bytes([number] * 32)).public for number in (1, 2))


def test_a_holder_of_the_jobs_key_proves_it_for_each_connection_anew():
    here, there = ProcessProof(KEY), ProcessProof(KEY)
    proofs = {here.fresh(OWN) for _ in range(20)}
    assert len(proofs) == 20
    for proof in proofs:
        assert len(proof) == PROOF_BYTES
        assert there.is_valid(proof, OWN)


def test_another_process_cannot_use_it():
    proof = ProcessProof(KEY).fresh(OWN)
    assert not ProcessProof(KEY).is_valid(proof, OTHER)


def test_another_jobs_key_proves_nothing():
    assert not ProcessProof(KEY).is_valid(ProcessProof(JobKey.fresh()).fresh(OWN), OWN)


@pytest.mark.parametrize("place", range(PROOF_BYTES))
def test_no_byte_of_it_can_be_changed(place):
    proof = bytearray(ProcessProof(KEY).fresh(OWN))
    proof[place] ^= 1
    assert not ProcessProof(KEY).is_valid(bytes(proof), OWN)


@pytest.mark.parametrize("size", [0, 8, PROOF_BYTES - 1, PROOF_BYTES + 1])
def test_it_has_one_size(size):
    proof = (ProcessProof(KEY).fresh(OWN) + b"\0")[:size]
    assert not ProcessProof(KEY).is_valid(proof, OWN)


def test_it_does_not_say_the_key_from_which_it_is_made():
    assert KEY.derive("processes") not in ProcessProof(KEY).fresh(OWN)
    assert KEY.derive("processes") not in {KEY.derive("curve"), KEY.derive("sntp"), KEY.secret}
