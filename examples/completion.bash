# Completes commands after -m, and keys, as after `accelerate launch ... -m accel_ft.train --` or `python -m accel_ft.predict --`:
#   source examples/completion.bash    (bash and zsh)
if [[ -n ${ZSH_VERSION:-} ]]; then
    type compdef >/dev/null || { autoload -U compinit && compinit; }
    autoload -U bashcompinit && bashcompinit
else # earlier completions of these programs stay in use for everything else
    for _accel_ft_name in accelerate python python3; do
        for _accel_ft_load in _comp_load _completion_loader; do
            declare -F $_accel_ft_load >/dev/null && $_accel_ft_load $_accel_ft_name &>/dev/null && break
        done
        [[ $(complete -p $_accel_ft_name 2>/dev/null) =~ -F\ ([^ ]+) && ${BASH_REMATCH[1]} != _accel_ft ]] &&
            eval "_accel_ft_before_$_accel_ft_name=${BASH_REMATCH[1]}"
    done
fi
_accel_ft() {
    local word=${COMP_WORDS[COMP_CWORD]} command="" known="" position python=${COMP_WORDS[0]}
    for ((position = 1; position < COMP_CWORD; position++)); do
        [[ ${COMP_WORDS[position]} == accel_ft.* ]] && command=${COMP_WORDS[position]//[^a-z_.]/}
    done
    local before=${COMP_WORDS[0]##*/}
    eval "before=\${_accel_ft_before_${before//[^a-z0-9]/}:-}"
    [[ -z $command && -n $before ]] && "$before" "$@"
    if ((COMP_CWORD > 0)) && [[ ${COMP_WORDS[COMP_CWORD - 1]} == -m ]]; then
        COMPREPLY+=($(compgen -W "$(printf 'accel_ft.%s ' doctor evaluate export predict report search train)" -- "$word"))
        return
    fi
    [[ -z $command && -n $before ]] && return
    if [[ -z $command || $word != -* ]]; then
        COMPREPLY=($(compgen -f -- "$word"))
        return
    fi
    local keys="_accel_ft_${command##*.}"
    eval "known=\$$keys"
    if [[ -z $known ]]; then # once per shell
        [[ $python == *accelerate ]] && python=python3
        known=$("$python" -m "$command" --help 2>/dev/null | grep -o -- '^ *--[a-z_]*' | tr -d ' ' | sort -u)
        eval "$keys=\$known"
    fi
    COMPREPLY=($(compgen -W "$known" -- "$word"))
}
complete -o filenames -F _accel_ft accelerate python python3
