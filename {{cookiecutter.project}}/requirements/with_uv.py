"""Run `uv pip`, which reads no configuration of pip, with the mirrors and certificates that pip is configured with.

    python requirements/with_uv.py install ...

Variables of uv's own that are set already win.
"""

import ast
import os
import subprocess
import sys

# pip's setting -> uv's variable, and the mark between several values there
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
SECTIONS = "global", "install", ":env:"  # a later one wins


def variables(listed: str) -> dict[str, str]:
    """uv's variables for what `pip config list` prints."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found and key in SETTINGS:
            variable, mark = SETTINGS[key]
            found[section][variable] = mark.join(str(ast.literal_eval(value)).split())
    return {variable: value for section in SECTIONS for variable, value in found[section].items()}


if __name__ == "__main__":
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    command = ["uv", "pip", *sys.argv[1:], "--python", sys.executable]
    os.execvpe(command[0], command, variables(listed.stdout) | os.environ)
