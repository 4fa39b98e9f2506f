"""``duckllm node-image``: builds the bootable image of a node, and hands it out on a network.

Mounted by cli/main.py. Parses options; duckllm/node_image does the work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from duckllm.cli.common import Waiting, tell
from duckllm.config import show_size

node_image = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A small bootable image whose single job is the worker: build it, and hand it out by network boot.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_BUILD_EXAMPLES = """\b
Examples:
  duckllm node-image build image
  duckllm node-image build image --packages debian --config node.toml
  sudo dd if=image/usb.img of=/dev/sdX bs=4M conv=fsync
"""

_SERVE_EXAMPLES = """\b
Examples:
  sudo duckllm node-image serve image --interface eth1 --token-file token
  sudo duckllm node-image serve image --interface eth1 --token-file token --http-port 8069
  sudo duckllm node-image serve image --interface eth1 --token-file token --range 10.0.0.100,10.0.0.200
"""


@node_image.command("build", epilog=_BUILD_EXAMPLES, short_help="Build the image from Debian packages.")
def build(
    out: Annotated[Path, typer.Argument(help="Folder for vmlinuz, initrd.img, usb.img and image.json.")],
    packages: Annotated[
        Path | None,
        typer.Option(
            help="Folder of extracted packages: filled if it is empty, else taken as it is, so that another "
            "build has the same packages.",
            show_default=False,
        ),
    ] = None,
    mirror: Annotated[
        str,
        typer.Option(help="Debian mirror, like http://snapshot.debian.org/archive/debian/20260101T000000Z."),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(help="A node.toml with token and settings for the USB form.", show_default=False),
    ] = None,
    shell: Annotated[
        bool,
        typer.Option("--shell", help="Give the console a shell, without a password; for looking around."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print image.json instead of a sentence.")] = False,
) -> None:
    """Build the image from Debian packages and this installation: kernel, initramfs, and a USB form for UEFI.

    Needs mmdebstrap, squashfs-tools, cpio, zstd, mtools, fdisk, kmod and binutils. $SOURCE_DATE_EPOCH sets
    the time of every file; the same packages, installation and options give the same bytes.
    docs/node-image.md says what is in it.
    """
    from duckllm.node_image.build import KERNEL_OPTIONS, BuildOptions, epoch_from_environment
    from duckllm.node_image.build import build as build_image

    options = BuildOptions(packages, mirror, shell, config, epoch_from_environment())
    with Waiting("Building the image"):
        facts = build_image(out, options, tell)
    if as_json:
        print(json.dumps(facts))
        return
    for name, num_bytes in facts["bytes"].items():
        print(f"{out / name}: {show_size(num_bytes)}, sha256 {facts['sha256'][name]}")
    print(f"kernel {facts['kernel']}; start it with: {KERNEL_OPTIONS}")


@node_image.command("serve", epilog=_SERVE_EXAMPLES, short_help="Hand the image out by network boot.")
def serve(
    image: Annotated[Path, typer.Argument(help="Folder that duckllm node-image build wrote.")],
    interface: Annotated[
        str, typer.Option(help="Network interface to serve on, and no other.", show_default=False)
    ],
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the cluster token (else $DUCKLLM_CLUSTER_TOKEN).")
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address, or addresses with commas, of the host that nodes let connect; else any."),
    ] = "",
    port: Annotated[int, typer.Option(help="Port of the nodes' workers.")] = 7411,
    dhcp_range: Annotated[
        str | None,
        typer.Option(
            "--range",
            help="First and last address to give out, where no other DHCP server is; without it one gives "
            "addresses, and this one only says what to boot (proxy DHCP).",
            show_default=False,
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            help="Send kernel, initramfs and settings by HTTP on this port, which is faster than TFTP.",
            show_default=False,
        ),
    ] = None,
    ipxe: Annotated[Path, typer.Option(help="Folder of iPXE's boot programs (Debian: package ipxe).")] = Path(
        "/usr/lib/ipxe"
    ),
    write_only: Annotated[
        Path | None,
        typer.Option(
            help="Write dnsmasq's configuration and the files it sends into this folder, start nothing, and "
            "print what would be started.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Hand the image out on one network interface, by dnsmasq: proxy DHCP, TFTP and, by option, HTTP.

    Runs until Ctrl-C. Every machine that boots from the network there becomes a node, and is told the cluster
    token in the clear: use it on a network of the cluster's own.
    """
    from duckllm.cluster.token import read_token
    from duckllm.node_image.serve import ServeOptions, commands, prepare, run

    options = ServeOptions(image, interface, read_token(token_file), host, port, dhcp_range, http_port, ipxe)
    if write_only is not None:
        prepared = prepare(options, write_only)
        print("\n".join(commands(prepared, http_port)))
        return
    run(options, tell)
