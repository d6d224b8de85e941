"""The scheduler: membership, ranks, keys, policies and their consistency, and the process that runs them.

All but `process` is pure: events and the time in, instructions out. From top to bottom:

    process         sockets, threads, files, signals, the worker that forms policies
    several_jobs    several jobs on one scheduler
    standby         takes over a job whose scheduler is gone
    machine         one job from its first node to its last: its policies, its end, what observers see of it
    views           a job that nodes may leave and join
    job             a job whose nodes have all joined: what they send, and what it answers
    failures        failed links and detours around them
    rendezvous      a job before it begins: nodes join, or are refused
    members         the nodes of a job that has begun: liveness, barriers
    policies        when a policy is formed, and whether it is installed; `policy_former` forms it
    build_status    what people and monitoring systems see: JSON of the schema in `status`, metrics
    snapshot        everything about a job at one moment
    awareness       an estimate of the network, made of `measured_links`
    replay_log      what another process needs to take over a job
    rounds          which policy each round of each key runs under
"""

from __future__ import annotations
