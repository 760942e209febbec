"""Credentials taken out of text before it is written anywhere, and told where they would be."""

import re

SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|(?<!MON)KEY")  # in the name of a variable
URL = re.compile(r"://(\S*)")

# What looks like a secret -> its form, in the name of a file and in its content. A new kind is one row.
NAMES = {
    "a file of settings and passwords": r"\.env(\.(?!example|sample|template).*)?|\.(netrc|pgpass|npmrc|pypirc)",
    "a file of credentials": r"(?i:[\w-]*(secret|credential)s?(\.(json|ya?ml|toml|ini|cfg|conf|txt))?)",
    "a private key": r"id_(rsa|dsa|ecdsa|ed25519)|.*\.(key|p12|pfx|jks|keystore|ppk|kdbx)",
}
CONTENTS = {
    "a private key": rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY",
    "an AWS key": rb"\b(AKIA|ASIA)[A-Z0-9]{16}\b|(?i:aws_secret_access_key)\W{1,6}[A-Za-z0-9/+]{40}",
    "a token": rb"\b(gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{22}|glpat-[\w-]{20}|hf_[A-Za-z0-9]{30}"
    rb"|xox[abprs]-[\w-]{10}|sk-[\w-]*[A-Za-z0-9]{24}|pypi-[\w-]{50}|AIza[\w-]{35}|dapi[0-9a-f]{32}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.)",
}


def without_credentials(text: str) -> str:
    """`text` with the user, the password and the query of every URL in it left out."""
    return URL.sub(_bare, text)


def _bare(url: re.Match[str]) -> str:
    """://user:password@host/path?query without its secrets; a password may hold any mark, also a slash."""
    place, _, query = url[1].partition("?")
    return "://" + ("(hidden)" if "@" in query else place.rpartition("@")[2])  # its password may hold the ?, too


def secret_in(name: str, content: bytes) -> str | None:
    """What a file looks like by its name (without folders) or its content, if it looks like a secret."""
    by_name = (kind for kind, form in NAMES.items() if re.fullmatch(form, name))
    by_content = (kind for kind, form in CONTENTS.items() if re.search(form, content))
    return next(by_name, None) or next(by_content, None)
