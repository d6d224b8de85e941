"""The dashboard: a page that shows a job in a browser, live or from a recording.

server      Starlette: polls a scheduler once for all viewers, pushes what is new by server-sent events
page        the files of the page, and a report: one HTML file with a recording inside
recording   statuses in a file, a line each
history     statuses over time, as the page shows them: frames, curves, events. Pure
static      the page itself: HTML, CSS and JavaScript as they are written, without a build step
"""

from __future__ import annotations
