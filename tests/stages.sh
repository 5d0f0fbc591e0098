# To be sourced. `stage NAME COMMAND...` runs a command; when the outermost script ends, a table shows the seconds of each stage.
if [ -z "${STAGES:-}" ]; then
  STAGES="$(mktemp)"
  export STAGES
  trap 'printf "\nseconds\nwall\tuser\tsystem\n"; cat "$STAGES"; printf "%s\t\t\tall\n" "$SECONDS"; rm "$STAGES"' EXIT
fi

# Tests start many processes. Where Python is told to keep no bytecode, the imports of each take 3 seconds more.
export PYTHONDONTWRITEBYTECODE=

stage() {
  TIMEFORMAT=$'%0R\t%0U\t%0S\t'"$1"
  shift
  { time "$@" 2>&3; } 3>&2 2>>"$STAGES"
}
