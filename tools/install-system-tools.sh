#!/usr/bin/env bash
# Install promtool where apt may do so. Elsewhere say what is missing: the tests that need it skip, or fail with CI=true.
set -euo pipefail

has() { command -v "$1" >/dev/null 2>&1; }

if has promtool; then
    exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
    as_root=(sudo -n)
fi

install_promtool() {
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq)
    "${apt[@]}" update
    # Newer releases of Debian have it as a package of its own, without the server.
    "${apt[@]}" install -y --no-install-recommends promtool || "${apt[@]}" install -y --no-install-recommends prometheus
}

if has apt-get && "${as_root[@]}" true 2>/dev/null; then
    install_promtool >&2 || true
fi
if ! has promtool; then
    echo "promtool is missing (it comes with Prometheus): the tests that need it skip, or fail with CI=true" >&2
fi
