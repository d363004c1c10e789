#!/usr/bin/env bash
# Unpack Prometheus and Alertmanager below .tools/, from the Debian mirror that this machine uses anyway: as packages
# they would start services. Debian's own release goes to .tools/stable, the newest to .tools/newest: the rules are to
# work with both. Elsewhere say what is missing: the tests that need it skip, or fail with CI=true.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

as_root=()
if [[ $(id -u) -ne 0 ]]; then
    as_root=(sudo -n)
fi

# unpack SUITE FOLDER: with an apt of its own, that knows nothing of what is installed here. All of it or nothing.
unpack() (
    set -e
    suite=$1 folder=$PWD/.tools/$2
    [[ ! -d $folder ]] || exit 0
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' | awk '$1 == "Debian" { print $2; exit }')
    [[ -n $mirror ]]
    rm -rf "$folder.new" && mkdir -p "$folder.new/apt/lists/partial" "$folder.new/apt/archives/partial"
    cd "$folder.new/apt"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >sources.list
    apt=(apt-get -qq -o "Dir::Etc::sourcelist=$PWD/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State=$PWD"
        -o "Dir::Cache=$PWD" -o Dir::State::status=/dev/null -o APT::Sandbox::User=root)
    "${apt[@]}" update
    "${apt[@]}" download prometheus prometheus-alertmanager
    # Newer releases of Debian have it as a package of its own.
    "${apt[@]}" download promtool 2>/dev/null || true
    for package in *.deb; do dpkg -x "$package" ..; done
    cd ..
    for program in prometheus promtool prometheus-alertmanager amtool; do [[ -x usr/bin/$program ]]; done
    rm -rf apt
    mv "$folder.new" "$folder"
)

if command -v apt-get >/dev/null; then
    # Tells where the mirror is.
    "${as_root[@]}" apt-get -qq update >&2 || true
    # In a condition, `set -e` would not hold in the function.
    set +e
    unpack "$(. /etc/os-release && echo "$VERSION_CODENAME")" stable >&2
    unpack sid newest >&2
fi
for folder in stable newest; do
    if [[ ! -d .tools/$folder ]]; then
        echo "no Prometheus in .tools/$folder: the tests that need it skip, or fail with CI=true" >&2
    fi
done
