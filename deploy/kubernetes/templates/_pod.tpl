{{/* Labels of a part of the job: list CONTEXT PART. */}}
{{- define "netstorm.labels" -}}
app.kubernetes.io/name: netstorm
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* What all pods have in common. */}}
{{- define "netstorm.pod" -}}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false         # the variables of Services would be taken for settings
securityContext:
  runAsNonRoot: true
  runAsUser: 10001                # the image's
  runAsGroup: 10001
  fsGroup: 10001                  # may read the key
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- if .Values.clusters.enabled }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- end }}

{{- define "netstorm.container" -}}
image: {{ .Values.image | quote }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "netstorm.keyVolume" -}}
name: key
secret:
  secretName: {{ if .Values.key.text }}{{ .Release.Name }}-key{{ else }}{{ .Values.key.secret }}{{ end }}
  defaultMode: 0440
{{- end }}

{{/* Variables of all processes. */}}
{{- define "netstorm.env" -}}
{{- range $name, $value := .Values.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
- {name: NETSTORM_KEY_FILE, value: /key/job.key}
- {name: DMLC_NUM_WORKER, value: {{ .Values.clusters.enabled | ternary .Values.clusters.nodes .Values.nodes | quote }}}
- {name: DMLC_PS_ROOT_PORT, value: {{ .Values.scheduler.port | quote }}}
{{- end }}
