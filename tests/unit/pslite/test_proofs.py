"""Proofs by which a node recognises the schedulers of its job, and nobody else."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.protocol.messages import Member
from netstorm.pslite.proofs import SchedulerSecret, is_proof, proof_for_offer, proof_for_resume

SECRET = SchedulerSecret(b"s" * 32)
MEMBER = Member(rank=1, host="h", port=9, site="", incarnation=7, user="key 1")


def test_schedulers_of_one_secret_make_the_same_proofs_and_others_do_not():
    key = SECRET.key_for("job", MEMBER)
    proof = proof_for_resume(key, 3)
    assert is_proof(proof, proof_for_resume(SchedulerSecret(b"s" * 32).key_for("job", MEMBER), 3))
    assert not is_proof(proof, proof_for_resume(SchedulerSecret(b"t" * 32).key_for("job", MEMBER), 3))


@pytest.mark.parametrize(
    ("job", "change"), [("other", {}), ("job", {"incarnation": 8}), ("job", {"user": "key 2"})]
)
def test_each_process_of_each_job_has_a_key_of_its_own(job, change):
    assert SECRET.key_for(job, msgspec.structs.replace(MEMBER, **change)) != SECRET.key_for("job", MEMBER)


def test_a_proof_is_for_one_number_and_for_one_address():
    key = SECRET.key_for("job", MEMBER)
    assert not is_proof(proof_for_resume(key, 3), proof_for_resume(key, 4))
    assert not is_proof(proof_for_offer(key, "h", 1), proof_for_offer(key, "h", 2))
    assert not is_proof(proof_for_offer(key, "h1", 1), proof_for_offer(key, "h", 11))


def test_where_no_proof_can_be_made_nothing_is_one():
    for nothing in (
        SchedulerSecret().key_for("job", MEMBER),
        SECRET.key_for("job", msgspec.structs.replace(MEMBER, user="")),
    ):
        assert nothing == proof_for_resume(nothing, 1) == b""
        assert not is_proof(b"", proof_for_resume(nothing, 1))


def test_no_text_shows_the_secret():
    assert "s" * 8 not in f"{SECRET!r} {SECRET.hidden()!r}"
    assert SECRET.hidden().key == b"s" * 32
