"""Fetch the libraries that SimpleTuner's pages load from content networks, for browsers that reach no such network.

The pages of the Web UI name them by address; the browser tests answer those addresses from here. So they need npm
once, and no network when they run. Versions and checksums are pinned.

python -m scripts.dev.page_libraries
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FOLDER = Path(__file__).parents[2] / ".cache" / "page-libraries"
KINDS = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}


@dataclass(frozen=True)
class Library:
    """A package of the registry. A page asks for ``address`` and the path of a file inside the package."""

    name: str
    version: str
    sha512: str
    address: str
    folders: tuple[str, ...] = ("dist/",)

    @property
    def place(self) -> Path:
        return FOLDER / f"{self.name.replace('/', '+')}-{self.version}"

    def fetch(self) -> None:
        """Unpack what pages ask for, once; ValueError where it is not the package we know."""
        if self.place.is_dir():
            return
        packed = _pack(f"{self.name}@{self.version}")
        found = base64.b64encode(hashlib.sha512(packed).digest()).decode()
        if found != self.sha512:
            raise ValueError(f"{self.name} {self.version} has the checksum {found}, expected {self.sha512}")
        unfinished = self.place.with_name(f".{self.place.name}.{os.getpid()}")
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                inside = PurePosixPath(member.name).relative_to("package")
                if member.isfile() and inside.suffix in KINDS and str(inside).startswith(self.folders):
                    target = unfinished / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    content = archive.extractfile(member)
                    assert content is not None
                    target.write_bytes(content.read())
        unfinished.rename(self.place)


def _pack(package: str) -> bytes:
    """The package as npm gets it, from whatever registry it is set up for."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", package, "--loglevel=error", "--pack-destination", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).glob("*.tgz")
        return file.read_bytes()


LIBRARIES = (
    Library(
        "htmx.org",
        "2.0.8",
        "fm297iru0iWsNJlBrjvtN7V9zjaxd+69Oqjh4F/Vq9Wwi2kFisLcrLCiv5oBX0KLfOX/zG8AUo9ROMU5XUB44Q==",
        "https://unpkg.com/htmx.org@2.0.8/",
    ),
    Library(
        "alpinejs",
        "3.17.4",
        "N2gsr+58XVUt7OAPKnUGiKPDtkd+xbSGTae8C8IJxeRdkkhBJPIautkJ+qcwb7lcjJ/QK3/CPVIbN20JPvtK7A==",
        "https://unpkg.com/alpinejs@3.x.x/",
    ),
    Library(
        "@alpinejs/collapse",
        "3.17.4",
        "Us4cE8jHzKtRs4mYNbmX4art/Hpm90vIGH6h5Mcv1EWK9Dgg48RNzSlPFt9F/D6bk2onbdeagYayqEvzpPbqPg==",
        "https://unpkg.com/@alpinejs/collapse@3.x.x/",
    ),
    Library(
        "bootstrap",
        "5.3.8",
        "HP1SZDqaLDPwsNiqRqi5NcP0SSXciX2s9E+RyqJIIqGo+vJeN5AJVM98CXmW/Wux0nQ5L7jeWUdplCEf0Ee+tg==",
        "https://cdn.jsdelivr.net/npm/bootstrap@5.3.8/",
    ),
    Library(
        "@fortawesome/fontawesome-free",
        "7.0.1",
        "RLmb9U6H2rJDnGxEqXxzy7ANPrQz7WK2/eTjdZqyU9uRU5W+FkAec9uU5gTYzFBH7aoXIw2WTJSCJR4KPlReQw==",
        "https://cdnjs.cloudflare.com/ajax/libs/font-awesome/7.0.1/",
        folders=("css/", "webfonts/"),
    ),
    Library(
        "js-yaml",
        "4.3.2",
        "SFNOvSJ+Dgf/9An904Yx+CgSlIPCkIpao4qo51lpee25TIRejdH3rhR4EZMGoNx3/TP3O+wzWuiTFl4sqbltzA==",
        "https://cdn.jsdelivr.net/npm/js-yaml@4/",
    ),
    Library(
        "markdown-it",
        "14.3.3",
        "L//tDAkjTjJCU6pBUSBTgs3Kg4InVaZuUZog/b6V12UKhcDQ7S78877ibbCanRExwPuYP1CZD7Gd2dxSy1GXRg==",
        "https://cdn.jsdelivr.net/npm/markdown-it@14/",
    ),
    Library(
        "dompurify",
        "3.4.17",
        "B/pSlYVHQ58kqISD/yDjuJ1yfzI34m1gF4lAod2bwSRhiN4K5Cl3H8Af7hqB2PmTL911tdEudnnXn5FnhRoz0w==",
        "https://cdn.jsdelivr.net/npm/dompurify@3/",
    ),
    # SimpleTuner 3.1's page
    Library(
        "htmx.org",
        "2.0.3",
        "AeoJUAjkCVVajbfKX+3sVQBTCt8Ct4lif1T+z/tptTXo8+8yyq3QIMQQe/IT+R8ssfrO1I0DeX4CAronzCL6oA==",
        "https://unpkg.com/htmx.org@2.0.3/",
    ),
    Library(
        "bootstrap",
        "5.3.0",
        "UnBV3E3v4STVNQdms6jSGO2CvOkjUMdDAVR2V5N4uCMdaIkaQjbcEAMqRimDHIs4uqBYzDAKCQwCB+97tJgHQw==",
        "https://cdn.jsdelivr.net/npm/bootstrap@5.3.0/",
    ),
    Library(
        "@fortawesome/fontawesome-free",
        "6.4.0",
        "0NyytTlPJwB/BF5LtRV8rrABDbe3TdTXqNB3PdZ+UUUZAEIrdOJdmABqKjt4AXwIoJNaRVVZEXxpNrqvE1GAYQ==",
        "https://cdnjs.cloudflare.com/ajax/libs/font-awesome/6.4.0/",
        folders=("css/", "webfonts/"),
    ),
)


def fetched() -> bool:
    return all(library.place.is_dir() for library in LIBRARIES)


def answer(url: str) -> tuple[str, bytes] | None:
    """(content type, content) of an address that a page asks for; None where it is not one of these."""
    for library in LIBRARIES:
        if url.startswith(library.address):
            path = library.place / url.removeprefix(library.address).partition("?")[0]
            return (KINDS[path.suffix], path.read_bytes()) if path.is_file() else None
    return None


def main() -> None:
    for library in LIBRARIES:
        library.fetch()


if __name__ == "__main__":
    main()
