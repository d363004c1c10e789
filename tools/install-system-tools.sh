#!/usr/bin/env bash
# Unpack Prometheus and Alertmanager below .tools/, from the Debian mirror that this machine uses anyway: as packages
# they would start services. Debian's own release goes to .tools/stable, the newest to .tools/newest: the rules are to
# work with both. Elsewhere say what is missing: the tests that need it skip, or fail with CI=true.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
packages=(prometheus prometheus-alertmanager)
# Newer releases of Debian have it as a package of its own.
maybe=(promtool)

as_root=()
if [[ $(id -u) -ne 0 ]]; then
    as_root=(sudo -n)
fi

# unpack SUITE FOLDER: with an apt of its own, that knows nothing of what is installed here.
unpack() {
    local suite=$1 folder=$PWD/.tools/$2 mirror
    [[ ! -x $folder/usr/bin/prometheus ]] || return 0
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' | awk '$1 == "Debian" { print $2; exit }')
    [[ -n $mirror ]] || return 1
    rm -rf "$folder" && mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$folder/apt/sources.list"
    local apt=(apt-get -qq -o "Dir::Etc::sourcelist=$folder/apt/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State=$folder/apt" -o "Dir::Cache=$folder/apt" -o Dir::State::status=/dev/null
        -o APT::Sandbox::User=root)
    "${apt[@]}" update
    (
        cd "$folder/apt"
        "${apt[@]}" download "${packages[@]}"
        "${apt[@]}" download "${maybe[@]}" 2>/dev/null || true
        for package in *.deb; do dpkg -x "$package" "$folder"; done
    )
    rm -rf "$folder/apt"
}

if command -v apt-get >/dev/null; then
    # Tells where the mirror is.
    "${as_root[@]}" apt-get -qq update >&2 || true
    unpack "$(. /etc/os-release && echo "$VERSION_CODENAME")" stable >&2 || true
    unpack sid newest >&2 || true
fi
for folder in stable newest; do
    if [[ ! -x .tools/$folder/usr/bin/promtool ]]; then
        echo "no Prometheus in .tools/$folder: the tests that need it skip, or fail with CI=true" >&2
    fi
done
