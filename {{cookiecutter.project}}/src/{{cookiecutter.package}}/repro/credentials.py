"""Credentials taken out of text before it is written anywhere."""

import re

SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|(?<!MON)KEY")  # in the name of a variable
URL = re.compile(r"://(?:[^/\s]*@)?([^?\s]*)(?:\?\S*)?")  # ://user:password@ (host/path) ?query


def without_credentials(text: str) -> str:
    """`text` with the user, the password and the query of every URL in it left out."""
    return URL.sub(r"://\1", text)
