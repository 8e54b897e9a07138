// A client of either generation of the TypeScript SDK: `sdk_client.mjs 1|2 PLAN`, with a plan as in plans.py.
// Runs from the folder that has the packages. Prints one JSON object.

const [generation, text] = process.argv.slice(2);
const plan = JSON.parse(text);
const questions = [];
const notices = [];

const answers = {
  'sampling/createMessage': { role: 'assistant', content: { type: 'text', text: 'sampled' }, model: 'scripted' },
  'elicitation/create': { action: 'accept', content: { name: 'Ada', check: true } },
  'roots/list': { roots: [{ uri: 'file:///project', name: 'project' }] }
};
const full = { sampling: {}, elicitation: { form: {}, url: {} }, roots: { listChanged: true } };

async function load() {
  const info = { name: 'sdk-client', version: '1' };
  const capabilities = plan.full ? full : {};
  if (generation === '2') {
    const { Client, StreamableHTTPClientTransport } = await import('@modelcontextprotocol/client');
    const { StdioClientTransport } = await import('@modelcontextprotocol/client/stdio');
    const client = new Client(info, { capabilities, versionNegotiation: { mode: 'auto' } });
    return { client, StdioClientTransport, StreamableHTTPClientTransport, method: (name) => name };
  }
  const { Client } = await import('@modelcontextprotocol/sdk/client/index.js');
  const { StdioClientTransport } = await import('@modelcontextprotocol/sdk/client/stdio.js');
  const { StreamableHTTPClientTransport } = await import('@modelcontextprotocol/sdk/client/streamableHttp.js');
  const types = await import('@modelcontextprotocol/sdk/types.js');
  const schemas = {
    'sampling/createMessage': types.CreateMessageRequestSchema,
    'elicitation/create': types.ElicitRequestSchema,
    'roots/list': types.ListRootsRequestSchema
  };
  const client = new Client(info, { capabilities });
  return { client, StdioClientTransport, StreamableHTTPClientTransport, method: (name) => schemas[name] };
}

const { client, StdioClientTransport, StreamableHTTPClientTransport, method } = await load();
if (plan.full) {
  for (const [name, answer] of Object.entries(answers)) {
    client.setRequestHandler(method(name), async (request) => {
      questions.push([name, request.params ?? null]);
      return answer;
    });
  }
}
client.fallbackNotificationHandler = async (notification) => {
  notices.push(notification);
};

function take([what, name, args, value]) {
  const options = { onprogress: (progress) => notices.push(['progress', progress]) };
  switch (what) {
    case 'tools': return client.listTools();
    case 'prompts': return client.listPrompts();
    case 'resources': return client.listResources();
    case 'templates': return client.listResourceTemplates();
    case 'call': {
      const params = { name, arguments: args };
      return generation === '2' ? client.callTool(params, options) : client.callTool(params, undefined, options);
    }
    case 'prompt': return client.getPrompt({ name, arguments: args });
    case 'read': return client.readResource({ uri: name });
    case 'subscribe': return client.subscribeResource({ uri: name });
    case 'complete': return client.complete({ ref: { type: 'ref/prompt', name }, argument: { name: args, value } });
    case 'level': return client.setLoggingLevel(name);
    default: throw new Error(`unknown step ${what}`);
  }
}

const [command, ...args] = plan.command;
const transport = command.startsWith('http://')
  ? new StreamableHTTPClientTransport(new URL(command))
  : new StdioClientTransport({ command, args, env: process.env });
await client.connect(transport);
const server = {
  info: client.getServerVersion(),
  capabilities: client.getServerCapabilities(),
  instructions: client.getInstructions(),
  revision: generation === '2' ? client.getNegotiatedProtocolVersion?.() : undefined
};
const results = [];
for (const step of plan.steps) {
  try {
    results.push(await take(step));
  } catch (error) {
    results.push({ exception: `${error.name}: ${error.message}` });
  }
}
await client.close();
console.log(JSON.stringify({ server, answers: results, questions, notices }));
