"""schemathesis over a socket: requests that match /openapi.json, or nearly do, are answered in time and never with a
server error.
"""

import contextlib

import schemathesis
from case import BASE, KEY, report
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

PACKAGES = ["schemathesis"]
HEADERS = {"Authorization": f"Bearer {KEY}"}
EXAMPLES = 10


async def any_request():
    """Send requests generated from /openapi.json, valid and invalid ones, to every route. Raises AssertionError for an
    answer with status 500 or more.

    Sends EXAMPLES requests to a route with a body and 2 to any other, in both modes of schemathesis. Requests ask for
    at most 2 tokens and have a timeout of 0.2 s.
    """
    schema = schemathesis.openapi.from_url(BASE + "/openapi.json", headers=HEADERS)
    for mode in GenerationMode:
        for operation in (each.ok() for each in schema.get_all_operations()):

            @settings(
                max_examples=EXAMPLES if operation.body else 2,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case):
                if isinstance(case.body, dict):
                    # What a small model would write for minutes.
                    case.body |= {"max_tokens": 2} if isinstance(case.body.get("max_tokens"), int) else {}
                    case.body["timeout"] = 0.2
                answer = case.call(headers=HEADERS, timeout=60)
                assert answer.status_code < 500, (case.method, case.path, answer.status_code, answer.content[:300])

            with contextlib.suppress(Unsatisfiable):  # a route without arguments has no invalid request
                check()


report(globals())
