# The environment of a run on a GH200. Source it; running it can't change your shell:
#
#     source scripts/setup_gh200_env.sh
#
# The same as eval "$(gh200 env)". Set GH200_UVM_OVERSUBSCRIPTION_RATIO or GH200_UVM_ACCESS_PATTERN before to choose
# them. Works in bash, zsh and sh; sets no shell option, needs no nvidia-smi, and on any trouble says so and leaves your
# shell as it was.

_gh200_sourced() {
    if [ -n "${ZSH_VERSION:-}" ]; then
        case "${ZSH_EVAL_CONTEXT:-}" in *file*) return 0 ;; *) return 1 ;; esac
    fi
    if [ -n "${BASH_VERSION:-}" ]; then
        [ "${BASH_SOURCE:-}" != "$0" ]
        return
    fi
    case "${0##*/}" in setup_gh200_env.sh) return 1 ;; *) return 0 ;; esac
}

_gh200_exports() {
    if command -v gh200 >/dev/null 2>&1; then
        gh200 env
    elif [ -x ./gh200 ]; then # a SimpleTuner tree with the package in it
        ./gh200 env
    elif "${PYTHON:-python3}" -c 'import simpletuner_gh200' 2>/dev/null; then
        "${PYTHON:-python3}" -m simpletuner_gh200.cli.main env
    else
        echo "gh200: simpletuner-gh200 is not installed here: activate its environment, or install it with pip" >&2
        return 1
    fi
}

_gh200_setup() {
    if ! _gh200_sourced; then
        echo "gh200: source this file instead of running it: source $0" >&2
        return 1
    fi
    if ! _gh200_commands=$(_gh200_exports); then
        echo "gh200: nothing was exported" >&2
        return 1
    fi
    eval "$_gh200_commands"
}

if _gh200_setup; then
    unset -f _gh200_setup _gh200_exports _gh200_sourced
    unset _gh200_commands
else
    unset -f _gh200_setup _gh200_exports _gh200_sourced
    unset _gh200_commands
    # shellcheck disable=SC2317
    return 1 2>/dev/null || exit 1
fi
