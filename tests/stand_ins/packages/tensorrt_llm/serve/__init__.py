from tensorrt_llm.serve.openai_server import OpenAIServer as OpenAIServer
