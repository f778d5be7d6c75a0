# Commands after -m, keys after `accelerate launch ... -m accel_ft.train --`, and after `python -m accel_ft.predict --`:
#   source examples/completion.bash    (bash and zsh)
if [[ -n ${ZSH_VERSION:-} ]]; then
    type compdef >/dev/null || { autoload -U compinit && compinit; }
    autoload -U bashcompinit && bashcompinit
fi
_accel_ft() {
    local word=${COMP_WORDS[COMP_CWORD]} command="" known="" position python=${COMP_WORDS[0]}
    for ((position = 1; position < COMP_CWORD; position++)); do
        [[ ${COMP_WORDS[position]} == accel_ft.* ]] && command=${COMP_WORDS[position]//[^a-z_.]/}
    done
    if ((COMP_CWORD > 0)) && [[ ${COMP_WORDS[COMP_CWORD - 1]} == -m ]]; then
        COMPREPLY=($(compgen -W "$(printf 'accel_ft.%s ' doctor evaluate export predict report search train)" -- "$word"))
        return
    fi
    if [[ -z $command || $word != -* ]]; then
        COMPREPLY=($(compgen -f -- "$word"))
        return
    fi
    local keys="_accel_ft_${command##*.}"
    eval "known=\$$keys"
    if [[ -z $known ]]; then # asked once a shell
        [[ $python == *accelerate ]] && python=python3
        known=$("$python" -m "$command" --help 2>/dev/null | grep -o -- '^ *--[a-z_]*' | sort -u)
        eval "$keys=\$known"
    fi
    COMPREPLY=($(compgen -W "$known" -- "$word"))
}
complete -o filenames -F _accel_ft accelerate python python3
