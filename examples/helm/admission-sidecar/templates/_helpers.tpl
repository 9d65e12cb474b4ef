{{- define "admission.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "admission.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "admission.labels" -}}
{{ include "admission.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "admission.storeSecret" -}}
{{- .Values.store.existingSecret | default (printf "%s-store" (include "admission.name" .)) -}}
{{- end -}}

{{- define "admission.adminSecret" -}}
{{- .Values.admin.existingSecret | default (printf "%s-token" (include "admission.name" .)) -}}
{{- end -}}

{{- define "admission.engineSecret" -}}
{{- .Values.engineKey.existingSecret | default (printf "%s-engine" (include "admission.name" .)) -}}
{{- end -}}

{{- define "admission.hasStore" -}}
{{- if or .Values.store.url .Values.store.existingSecret -}}true{{- end -}}
{{- end -}}

{{- define "admission.hasTenants" -}}
{{- if or .Values.tenants.files .Values.tenants.existingSecret -}}true{{- end -}}
{{- end -}}

{{/* Mistakes that no schema can see, because each concerns two values. */}}
{{- define "admission.validate" -}}
{{- $policy := fromYaml .Values.policy -}}
{{- if not .Values.policy -}}
{{- fail "policy: it is required. Write it into your values as text (policy: |), or give --set-file policy=policy.yaml" -}}
{{- end -}}
{{- if hasKey $policy "Error" -}}
{{- fail (printf "policy: it is no YAML mapping: %s" (get $policy "Error")) -}}
{{- end -}}
{{- if and (hasKey $policy "engines") .Values.upstream -}}
{{- fail "upstream: the policy names its engines (engines:): leave upstream empty, or remove engines: from the policy" -}}
{{- end -}}
{{- if not (or (hasKey $policy "engines") .Values.upstream) -}}
{{- fail "upstream: there is no engine to send requests to. Give its address, or write engines: into the policy" -}}
{{- end -}}
{{- if not (or .Values.admin.token .Values.admin.existingSecret) -}}
{{- fail "admin: the admin port is reachable from outside of the pod, so it needs a token: give admin.existingSecret or admin.token" -}}
{{- end -}}
{{- range $name := list "admin" "store" "engineKey" -}}
{{- $values := get $.Values $name -}}
{{- if and $values.existingSecret (or $values.token $values.url $values.value) -}}
{{- fail (printf "%s: it has a value and existingSecret: give one of them" $name) -}}
{{- end -}}
{{- end -}}
{{- $most := ternary (max .Values.autoscaling.minReplicas .Values.autoscaling.maxReplicas) .Values.replicaCount .Values.autoscaling.enabled -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling: minReplicas is larger than maxReplicas" -}}
{{- end -}}
{{- if and (gt (int $most) 1) (not (include "admission.hasStore" .)) (not (hasKey $policy "store")) -}}
{{- fail "store: several replicas share one pool, which is kept in a store: give store.existingSecret or store.url, or one replica" -}}
{{- end -}}
{{- if and .Values.tenants.files .Values.tenants.existingSecret -}}
{{- fail "tenants: give files or existingSecret, not both" -}}
{{- end -}}
{{- if and (include "admission.hasTenants" .) (not (has "../tenants/*.yaml" (ternary (get $policy "tenants") (list (get $policy "tenants")) (kindIs "slice" (get $policy "tenants"))))) -}}
{{- fail "tenants: the policy does not read them. Write into it: tenants: ../tenants/*.yaml" -}}
{{- end -}}
{{- end -}}
