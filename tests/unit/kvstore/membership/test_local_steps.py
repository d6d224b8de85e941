"""Reports to the state server: answered once, sent again after a restart, failed with the job."""

from __future__ import annotations

from netstorm.errors import Closed
from netstorm.kvstore.membership import NodeLocalSteps, StepsRequest
from netstorm.kvstore.operations import Outbox
from netstorm.protocol.messages import StepsGranted, StepTimes
from netstorm.pslite.machine import Call, Send


class Asked:
    def __init__(self) -> None:
        self.outbox = Outbox()
        self.steps = NodeLocalSteps(self.outbox)
        self.ended: list[tuple[int, Exception | None]] = []

    def report(self, round: int) -> StepsRequest:
        report = StepTimes(training=0, round=round, step_s=1.0, least=1, most=8)
        request = StepsRequest(report=report, done=lambda error: self.ended.append((round, error)))
        self.steps.report(request)
        return request

    def sent(self) -> list[StepTimes]:
        taken = self.outbox.take()
        for instruction in taken:
            if isinstance(instruction, Call):
                instruction.function()
        messages = [instruction.message for instruction in taken if isinstance(instruction, Send)]
        return [message for message in messages if isinstance(message, StepTimes)]


def test_an_answer_completes_the_report_and_a_second_one_changes_nothing():
    asked = Asked()
    request = asked.report(3)
    assert [report.round for report in asked.sent()] == [3]
    asked.steps.granted(StepsGranted(training=0, round=3, steps=4))
    asked.steps.granted(StepsGranted(training=0, round=3, steps=7))
    asked.steps.granted(StepsGranted(training=0, round=2, steps=7))
    asked.sent()
    assert (request.steps, asked.ended) == (4, [(3, None)])


def test_an_answer_beyond_the_bounds_is_cut():
    asked = Asked()
    request = asked.report(0)
    asked.steps.granted(StepsGranted(training=0, round=0, steps=1000))
    assert request.steps == 8


def test_the_last_report_is_sent_again_even_if_it_was_answered():
    asked = Asked()
    asked.report(0)
    asked.steps.granted(StepsGranted(training=0, round=0, steps=1))
    asked.sent()
    asked.steps.report_again()
    assert [report.round for report in asked.sent()] == [0]


def test_what_waits_fails_with_the_job():
    asked = Asked()
    asked.report(0)
    error = Closed("over")
    asked.steps.fail_all(error)
    asked.sent()
    asked.report(1)
    asked.sent()
    assert asked.ended == [(0, error), (1, error)]
