# Keys after `accelerate launch ... -m accel_ft.train --`, and after `python -m accel_ft.predict --`:
#   source examples/completion.bash
_accel_ft() {
    local word=${COMP_WORDS[COMP_CWORD]} command="" position
    for ((position = 1; position < COMP_CWORD; position++)); do
        [[ ${COMP_WORDS[position]} == accel_ft.* ]] && command=${COMP_WORDS[position]}
    done
    if [[ -z $command || $word != -* ]]; then
        COMPREPLY=($(compgen -f -- "$word"))
        return
    fi
    local keys="_accel_ft_${command//./_}"
    if [[ -z ${!keys} ]]; then # asked once a shell
        printf -v "$keys" '%s' "$(python -m "$command" --help | grep -o -- '--[a-z_]*' | sort -u)"
    fi
    COMPREPLY=($(compgen -W "${!keys}" -- "$word"))
}
complete -o filenames -F _accel_ft accelerate python python3
