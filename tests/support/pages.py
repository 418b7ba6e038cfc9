"""The data of a report's page, unpacked."""

import base64
import gzip
import json
import re


def block(html, name):
    """The data of a block of the page."""
    packed = re.search(rf'<script type="text/plain" id="data-{name}">([^<]*)</script>', html).group(
        1
    )
    return json.loads(gzip.decompress(base64.b64decode(packed)))
