"""The scheduler: membership, ranks, keys, policies and their consistency, and the process that runs them.

All but `process` is pure: events and the time in, instructions out. From top to bottom:

    process       sockets, threads, files, signals, the worker that forms policies
    jobs          several jobs on one scheduler
    machine       one job: `job_lifecycle`, `job_policies` and `job_view` are parts of it
    job           a job whose nodes have all joined; `job_rounds` are its keys and rounds
    failures      failed links and detours around them
    membership    rendezvous, ranks, liveness, barriers
    policies      when a policy is formed, and whether it is installed
    observe       snapshots, status, metrics
    awareness     from the nodes' reports to an estimate of the network
    replay_log    what another process needs to take over a job
    rounds        which policy each round of each key runs under
"""
