"""Output in a required form: a choice, a regular expression, a JSON schema.

    python examples/structured_output.py [MODEL]

The model can only draw tokens that lead to a text of that form. A form that cannot be compiled fails its own request
and disturbs no other.
"""

import json
import sys

from jaxengine import LLM, RequestError, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 100000000},
        "coastal": {"type": "boolean"},
    },
    "required": ["name", "population", "coastal"],
    "additionalProperties": False,
}

llm = LLM(*sys.argv[1:])


def ask(prompt: str, **form) -> str:
    """Return the model's greedy answer to `prompt` in a required form. form: fields of StructuredOutputsParams. Raises
    RequestError if the form cannot be compiled.
    """
    params = SamplingParams(temperature=0.0, max_tokens=96, structured_outputs=StructuredOutputsParams(**form))
    (output,) = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
    return output.outputs[0].text


print("choice:", ask("Is 'I love it!' positive or negative?", choice=["positive", "negative"]))
print("regex: ", ask("On which date did people first land on the moon?", regex=r"\d{4}-\d{2}-\d{2}"))
city = json.loads(ask("Describe Lisbon as JSON.", json=SCHEMA))
print("json:  ", city)

try:
    ask("Anything.", regex="(")
except RequestError as error:
    print("refused:", str(error).splitlines()[0])
