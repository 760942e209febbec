"""The data of a run in Croissant 1.0, the format of MLCommons in which datasets are described: JSON-LD with digests."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...record.receipt import Receipt

if TYPE_CHECKING:
    from .bundle import About

CONFORMS = "http://mlcommons.org/croissant/1.0"
# The specification's own context: most words mean themselves in its vocabulary.
OWN = (
    "citeAs column equivalentProperty extract field fileProperty fileObject fileSet format includes isLiveDataset "
    "jsonPath key md5 parentField path recordSet references regex repeated replace samplingRate separator source "
    "subField transform"
)
CONTEXT: Mapping[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{name: f"cr:{name}" for name in OWN.split()},
}
LISTING = "text/plain"
UNKNOWN = "application/octet-stream"


def described(run: Receipt, about: "About", folder: bool) -> dict[str, Any]:
    """The dataset that a run started from, and the files that it was prepared into, each with its SHA-256.

    `about` is what the project says of itself. The dataset is a `folder` or one file; the SHA-256 of a
    folder is that of its listing, as `samebits hash-data --files` prints it.
    """
    raw, digest = str(run.stated["config"]["data.raw"]), str(run.stated["config"]["data.sha256"])
    prepared = str(run.stated["config"]["data.prepared"])
    what = "listing of the dataset: the SHA-256 and the path of each file" if folder else "dataset"
    files = [_file(f"{raw}.sha256sums" if folder else raw, digest, LISTING if folder else UNKNOWN, what)]
    files += [
        _file(f"{prepared}/{entry['path']}", entry["sha256"], UNKNOWN, "made from the dataset by `samebits prepare`")
        for entry in run.stated["preimage"]["data"]["files"]
    ]
    terms, source = (str(run.stated["config"].get(f"data.{key}") or "") for key in ("license", "source"))
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": f"{about.name}-data",
        "description": f"The data of {about.name}: the dataset, and the files that training and evaluation read.",
        "conformsTo": CONFORMS,
        "citeAs": about.cite,
        "datePublished": about.date,
        "url": about.url,
        **({"license": terms} if terms else {}),
        **({"isBasedOn": source} if source else {}),
        "version": f"0.0.0+{digest[:12]}",
        "distribution": files,
    }


def _file(path: str, sha256: str, kind: str, about: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": path,
        "name": path,
        "description": about,
        "contentUrl": path,
        "encodingFormat": kind,
        "sha256": sha256,
    }
